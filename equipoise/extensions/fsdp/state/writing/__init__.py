"""The shards of a process, written by all processes into one folder, immediately or in the background."""
