"""Writes the pages and tables that are made from the sources, the tests and the benchmarks, and prepares the
site.
"""
