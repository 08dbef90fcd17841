"""Files from outside, read strictly: JSON and YAML of the types asked for, else a sentence with file, key or line.

In: bytes and a type. Out: plain data of that type, or a UserError. And numbers in words, as people read them. Imports
nothing of this package but errors.
"""
