"""The strategies that are compared, and what is predicted of them."""
