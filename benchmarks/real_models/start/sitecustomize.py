"""Python imports this as it starts, in processes of stages as well, if `libraries` has put its folder on the path."""

from missing_operators import define_when_needed

define_when_needed()
