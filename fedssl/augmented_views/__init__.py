"""A page with random views of the user's images, as a method would train on them."""
