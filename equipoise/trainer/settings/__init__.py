"""Arguments of the Trainer, checked and turned into devices, strategies and callbacks."""
