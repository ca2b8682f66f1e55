"""Pipeline parallelism: a network cut into stages on several devices."""
