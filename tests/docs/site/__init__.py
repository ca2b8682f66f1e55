"""The pages as a whole: links between them, and the site that is made of them."""
