# Makes the Dockerfile of the image from its content list: awk -f dockerfile.awk contents.txt
BEGIN {
	print "# Made from contents.txt by `make generate`. Build with the repository as context,"
	print "# after `make build`: docker build -f deployments/image/Dockerfile ."
	print "FROM scratch"
}
{ sub(/#.*/, "") }
NF == 2 {
	print "COPY " $1 " " $2
	if (!entry) entry = $2
}
END {
	print "ENV PATH=/bin"
	print "ENTRYPOINT [\"" entry "\"]"
}
