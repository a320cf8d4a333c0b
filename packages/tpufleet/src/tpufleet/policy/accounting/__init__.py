"""Budgets, costs and limits."""
