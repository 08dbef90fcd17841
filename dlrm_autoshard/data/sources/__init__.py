"""Where samples come from: published data sets, files of one's own, drawn ones; each read by position."""
