"""Reads JSON and YAML from outside strictly, into typed plain data; writes numbers in words.

Bad input raises a UserError that names file, key or line. Imports nothing of this package but errors.
"""
