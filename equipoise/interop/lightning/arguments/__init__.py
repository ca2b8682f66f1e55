"""Objects of Lightning among the arguments of the Trainer, in the words of Equipoise."""
