"""Kinds of layers, one module for each: its options, their rules, and a record of its properties.

Every module of this folder with a record `KIND` adds a kind; no list names the modules.
"""
