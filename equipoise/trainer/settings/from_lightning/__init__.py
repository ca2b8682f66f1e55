"""Names and objects of Lightning among the arguments of the Trainer."""
