"""Classification of images with few labels: a linear classifier on the features of a frozen encoder."""
