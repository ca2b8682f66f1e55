"""Plans that cut the layers of a module that was written for one device, and where they come from."""
