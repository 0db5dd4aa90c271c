"""The command line: one file a command, no logic beyond reading arguments and showing results."""
