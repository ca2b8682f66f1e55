"""Callbacks: ordinary ones that use only public names; whoever reads one can write one."""
