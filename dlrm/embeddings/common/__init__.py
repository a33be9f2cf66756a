"""Shared by the embedding methods: budgets, caches of rows, factorizations, fits."""
