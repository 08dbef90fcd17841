"""Planning without a training job: pools of tables, tasks drawn from them, and the subcommands that use them."""
