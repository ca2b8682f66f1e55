"""`equipoise plan`: which strategy fits on which devices, before anything is trained."""
