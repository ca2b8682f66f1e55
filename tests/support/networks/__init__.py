"""Networks that several folders of tests train."""
