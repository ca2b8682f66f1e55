"""Files elsewhere: URLs of fsspec, with the methods of paths."""
