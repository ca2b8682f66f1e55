"""Private names of meshes, of cut layers and of transformers, beside those of `interop/distributed`."""
