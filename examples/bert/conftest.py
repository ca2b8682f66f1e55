"""Here so that the tests can import `bert`."""
