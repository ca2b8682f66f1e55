"""What counts as the same, and reasons against a program that ends with an error."""
