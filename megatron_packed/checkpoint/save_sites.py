"""Points of a save at which tests simulate crashes. See [Note: commit protocol] in ``save.py``."""

SAVE_SITES = (
    "save.begin",
    "save.directory_made",
    "shard.opened",
    "shard.header_written",
    "shard.piece_written",
    "shard.before_sync",
    "shard.synced",
    "attached.written",
    "attached.synced",
    "attached.renamed",
    "attached.durable",
    "shard.directory_synced",
    "save.gathered",
    "manifest.written",
    "manifest.synced",
    "manifest.renamed",
    "manifest.durable",
    "save.old_moved",
    "save.published",
    "save.durable",
    "save.verified",
    "latest.written",
    "latest.synced",
    "latest.renamed",
    "latest.durable",
    "save.old_removed",
)
"""Names of the points of the protocol, in order.

A save calls ``on_site`` with each name when it reaches the point. Tests simulate crashes there.
"""
