"""What embedding methods share: bags, budgets, caches of rows, factorizations, fits."""
