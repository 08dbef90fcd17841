"""What people look at, made from records alone: the terminal's tables, one HTML page, its charts."""
