"""MNIST: 70,000 handwritten digits, read from idx files in a folder of yours."""
