"""What encoders are worth: protocols with labels, and numbers of collapse without."""
