"""The simulation: an extension of torch in C++, and the Python that builds and installs it."""
