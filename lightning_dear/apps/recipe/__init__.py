"""``dear-recipe``: runs a paper's claims again."""
