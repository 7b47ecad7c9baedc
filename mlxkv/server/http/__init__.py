"""What HTTP is: sockets, who may call, bodies read, errors and events written. It knows no API by name."""
