"""Models of images, one family in a file."""
