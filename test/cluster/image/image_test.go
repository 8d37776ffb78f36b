package image

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
)

func write(t *testing.T, name, content string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, []byte(content), 0o755); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestAnArchiveHoldsWhatTheListSays(t *testing.T) {
	list := write(t, "list", "# comment\n"+write(t, "a", "AAA")+" /bin/a # the entry point\n\n"+write(t, "b", "BBB")+" /usr/lib/b\n")
	out := filepath.Join(t.TempDir(), "sub", "out.tar")
	if err := Write(list, "registry.local/x:dev", out); err != nil {
		t.Fatal(err)
	}
	tag, err := name.NewTag("registry.local/x:dev")
	if err != nil {
		t.Fatal(err)
	}
	img, err := tarball.ImageFromPath(out, &tag)
	if err != nil {
		t.Fatal(err)
	}
	config, err := img.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	if got := config.Config.Entrypoint; len(got) != 1 || got[0] != "/bin/a" {
		t.Errorf("entry point %v", got)
	}
}

func TestAListThatIsWrongIsRefusedByLine(t *testing.T) {
	for content, want := range map[string]string{
		"bin/a bin/a":      ":1: want SOURCE and an absolute DESTINATION",
		"# nothing":        "no files",
		"bin/none /none\n": "build it first",
	} {
		if err := Write(write(t, "list", content), "x:y", filepath.Join(t.TempDir(), "o")); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: got %v, want %s", content, err, want)
		}
	}
}
