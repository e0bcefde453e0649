"""
The store in memory and the scripts as they were before the scripts were rewritten.

What the present ones do is compared with these, by `tests/contract/test_stores_agree.py`.
"""
