"""launcher=pool: the jobs of a sweep on a pool of devices of this machine."""
