"""Commands, options and files of the tools that tpufleet replaces. Nothing else imports this."""
