// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package docs_test

import (
	"encoding/json"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
)

// source is an index of everything in the repository that documents may cite.
type source struct {
	root string
	// files are the paths of all files and directories, relative to root.
	files map[string]bool
	// names are the base names of all files.
	names map[string]bool
	// packages are the top-level identifiers by the name of their package.
	packages map[string]map[string]bool
	// members are the methods, fields, and test functions by the name of their type.
	members map[string]map[string]bool
	// imports are the names of packages that the code imports from elsewhere.
	imports map[string]bool
	// words are all identifiers in Go and all words in string literals, chart templates, demos, and requirements, except
	// tests.
	words map[string]bool
	// literals are all string literals in Go, except tests.
	literals map[string]bool
	// targets are the targets of the Makefile, and variables the variables in it.
	targets, variables map[string]bool
	// values are the chart's values: paths such as plugin.verbosity.
	values map[string]bool
}

// ignored are directories with build results and test clusters.
var ignored = regexp.MustCompile(`^(\.git|bin|\.cluster.*)$`)

func readSource(t *testing.T, root string) *source {
	t.Helper()
	s := &source{
		root: root, files: map[string]bool{}, names: map[string]bool{}, packages: map[string]map[string]bool{},
		members: map[string]map[string]bool{}, imports: map[string]bool{}, words: map[string]bool{},
		literals: map[string]bool{}, targets: map[string]bool{}, variables: map[string]bool{}, values: map[string]bool{},
	}
	fset := token.NewFileSet()
	if err := filepath.WalkDir(root, func(file string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		relative, err := filepath.Rel(root, file)
		if err != nil {
			return err
		}
		if entry.IsDir() && ignored.MatchString(relative) {
			return fs.SkipDir
		}
		s.files[relative], s.names[entry.Name()] = true, true
		switch {
		case entry.IsDir():
			return nil
		case path.Ext(file) == ".go":
			parsed, err := parser.ParseFile(fset, file, nil, parser.SkipObjectResolution)
			if err != nil {
				return err
			}
			s.addGo(parsed)
			if !strings.HasSuffix(file, "_test.go") { // tests contain wrong names
				s.addGoWords(parsed)
			}
			return nil
		case strings.HasPrefix(relative, "deployments/"), strings.HasPrefix(relative, "demo/"),
			relative == "conformance/requirements.yaml":
			return s.addText(file)
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	if err := s.addMakefile(filepath.Join(root, "Makefile")); err != nil {
		t.Fatal(err)
	}
	if err := s.addValues(filepath.Join(root, "deployments/helm/dra-driver-shared/values.schema.json")); err != nil {
		t.Fatal(err)
	}
	return s
}

func (s *source) addGo(file *ast.File) {
	pkg := strings.TrimSuffix(file.Name.Name, "_test")
	if s.packages[pkg] == nil {
		s.packages[pkg] = map[string]bool{}
	}
	for _, i := range file.Imports {
		if imported, err := strconv.Unquote(i.Path.Value); err == nil {
			s.imports[path.Base(imported)] = true
		}
		if i.Name != nil {
			s.imports[i.Name.Name] = true
		}
	}
	for _, d := range file.Decls {
		switch d := d.(type) {
		case *ast.FuncDecl:
			if d.Recv == nil {
				s.packages[pkg][d.Name.Name] = true
			} else {
				s.addMember(receiver(d.Recv.List[0].Type), d.Name.Name)
			}
		case *ast.GenDecl:
			for _, spec := range d.Specs {
				s.addSpec(pkg, spec)
			}
		}
	}
}

func (s *source) addGoWords(file *ast.File) {
	ast.Inspect(file, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.Ident:
			s.words[n.Name] = true
		case *ast.BasicLit:
			if text, err := strconv.Unquote(n.Value); err == nil && n.Kind == token.STRING {
				s.literals[text] = true
				s.addWords(text)
			}
		}
		return true
	})
}

func (s *source) addSpec(pkg string, spec ast.Spec) {
	switch spec := spec.(type) {
	case *ast.ValueSpec:
		for _, name := range spec.Names {
			s.packages[pkg][name.Name] = true
		}
	case *ast.TypeSpec:
		s.packages[pkg][spec.Name.Name] = true
		switch definition := spec.Type.(type) {
		case *ast.StructType:
			s.addFields(spec.Name.Name, definition.Fields)
		case *ast.InterfaceType:
			s.addFields(spec.Name.Name, definition.Methods)
		}
	}
}

func (s *source) addFields(typeName string, fields *ast.FieldList) {
	for _, f := range fields.List {
		for _, name := range f.Names {
			s.addMember(typeName, name.Name)
		}
	}
}

func (s *source) addMember(typeName, member string) {
	if s.members[typeName] == nil {
		s.members[typeName] = map[string]bool{}
	}
	s.members[typeName][member] = true
}

// receiver returns the name of a method's receiver type.
func receiver(e ast.Expr) string {
	switch e := e.(type) {
	case *ast.StarExpr:
		return receiver(e.X)
	case *ast.IndexExpr:
		return receiver(e.X)
	case *ast.Ident:
		return e.Name
	}
	return ""
}

var word = regexp.MustCompile(`[A-Za-z_]\w*`)

func (s *source) addWords(text string) {
	for _, w := range word.FindAllString(text, -1) {
		s.words[w] = true
	}
}

func (s *source) addText(file string) error {
	raw, err := os.ReadFile(file)
	s.addWords(string(raw))
	return err
}

var (
	targetLine   = regexp.MustCompile(`(?m)^([a-z][a-z0-9-]*):`)
	makeVariable = regexp.MustCompile(`\$\(([A-Z]+)\)|(?m)^([A-Z]+) [?:]?=`)
)

func (s *source) addMakefile(file string) error {
	raw, err := os.ReadFile(file)
	for _, m := range targetLine.FindAllStringSubmatch(string(raw), -1) {
		s.targets[m[1]] = true
	}
	for _, m := range makeVariable.FindAllStringSubmatch(string(raw), -1) {
		s.variables[m[1]+m[2]] = true
	}
	for _, m := range regexp.MustCompile(`\$\((?:if|addprefix) \$?\(?([A-Z]+)`).FindAllStringSubmatch(string(raw), -1) {
		s.variables[m[1]] = true
	}
	return err
}

// schema is what the chart's values.schema.json says about names.
type schema struct {
	Properties map[string]*schema `json:"properties"`
	Items      *schema            `json:"items"`
}

func (s *source) addValues(file string) error {
	raw, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	var top schema
	if err := json.Unmarshal(raw, &top); err != nil {
		return err
	}
	s.addSchema("", &top)
	return nil
}

func (s *source) addSchema(prefix string, node *schema) {
	if node.Items != nil {
		s.addSchema(prefix, node.Items)
	}
	for name, property := range node.Properties {
		s.values[prefix+name] = true
		s.addSchema(prefix+name+".", property)
	}
}

// topLevel returns the entries of the repository's root directory.
func (s *source) topLevel() map[string]bool {
	top := maps.Clone(s.files)
	maps.DeleteFunc(top, func(file string, _ bool) bool { return strings.Contains(file, "/") || file == "." })
	return top
}
