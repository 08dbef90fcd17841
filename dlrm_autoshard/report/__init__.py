"""What people read, made from records alone: the terminal's tables, one HTML page, its charts."""
