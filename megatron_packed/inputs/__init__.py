"""Inputs of a run: documents, packs of documents, and prompts.

``run_data.py`` brings them together: ``open_documents.py`` opens tokenizer and documents,
``plan_packs.py`` plans the packs, and ``sample_and_metric_prompts.py`` reads what the model answers
during training.
"""
