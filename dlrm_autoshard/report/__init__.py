"""Reports, made from records or a planner's result: the terminal's tables, one HTML page, its charts."""
