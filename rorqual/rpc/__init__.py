"""grpc.aio glue: channels and servers with the same settings at both ends, and the table of statuses."""
