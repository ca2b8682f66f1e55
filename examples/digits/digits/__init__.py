"""Handwritten digits: a small convolutional network on the images that come with scikit-learn."""
