"""Generation with the layers of a model: the state that a mixer keeps of each document.

`state.py` has the interface. A kind's file in ``layers/kinds`` names the state of its mixer.
"""
