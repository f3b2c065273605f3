"""The processes of a host: they end with their parent, ignore the job's signals, stand by, and run one source."""
