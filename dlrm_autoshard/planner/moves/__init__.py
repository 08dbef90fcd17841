"""Better plans for a job that runs under another one: what they save, and how little has to move."""
