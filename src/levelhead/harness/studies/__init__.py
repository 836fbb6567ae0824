"""The synthetic studies: what is measured beside a loss, and tasks that are made up."""
