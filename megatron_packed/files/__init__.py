"""Files and streams: opened and written so that no link, device or full disk is a surprise; checksums."""
