"""Published weights: Keras and PyTorch files, and the preprocessing of images."""
