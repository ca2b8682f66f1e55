"""VirtualDevicesStrategy: the same weights to the bit, whatever the number of devices."""
