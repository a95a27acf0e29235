"""How the weights of the drafter in `extras` were made, and how to make them again."""
