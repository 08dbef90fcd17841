"""What a set of tables takes on a rank, and what an exchange takes, learned from measurements of many sets."""
