"""Objects sent to other processes of this machine."""
